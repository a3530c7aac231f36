"""A client of the broker: a pure session in a shell of asyncio, and the replies it returns."""
