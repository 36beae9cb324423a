"""``fully_shard`` and what belongs to it: meshes, strategies, policies, clipping, offload."""
