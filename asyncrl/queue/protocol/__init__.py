"""The language of clients and broker: one record for each request, the replies, and a stream's settings."""
