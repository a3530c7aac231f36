"""A run made again from the decisions that it has recorded, and runs compared by them."""
