"""The weight stream: each published version, resharded from the learner's layout to each generator's.

layout, plan              which rank holds which box, and sends it to whom; pure
tensors, channels, delta  bytes between tensors and over channels
stream, store             versions: snapshot, pin, send, acknowledge; or stored in a folder or in Redis
"""
