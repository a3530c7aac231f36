"""The live weight stream: publisher, subscribers and relays."""
