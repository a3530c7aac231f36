"""The live weight stream: publisher, subscribers, relays and their control messages."""
