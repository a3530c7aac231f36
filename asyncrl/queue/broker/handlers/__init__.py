"""The handlers of requests, by sender: every client, feeder, generator, stage, learner, operator.

A handler is a function (queue, request, context) ▸ Reply, or None: the request waits, and is handled again when its
stream changes (a lookup: when something is posted) or when it is late.
"""
