"""Transports: one-sided access to the windows of other ranks. They know nothing of sharding."""
