"""Measures what a user meets: an endpoint under load, an engine at growing contexts."""
