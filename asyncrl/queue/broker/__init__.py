"""The broker process: one socket, a pure dispatcher behind it, and recovery after a restart."""
