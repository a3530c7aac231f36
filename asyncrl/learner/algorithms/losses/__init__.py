"""Policy and value losses, and their aggregation."""
