"""Taking a snapshot: shard plan, copy engine, worker."""
