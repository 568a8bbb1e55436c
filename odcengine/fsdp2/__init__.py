"""A model that somebody else has sharded with ``fully_shard``, on the project's transports."""
