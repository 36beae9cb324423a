"""``fully_shard`` and its parts: meshes, strategies, policies, clipping and offload."""
