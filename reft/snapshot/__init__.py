"""Takes snapshots (versions): shard plan, copy engine, arenas, worker."""
