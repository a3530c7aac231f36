"""Requests and replies between processes over ZeroMQ: messages, keys, sockets, one server and one client."""
