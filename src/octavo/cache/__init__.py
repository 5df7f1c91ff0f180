"""KV memory as ids: groups of layers, their blocks, block tables, and the prefix cache.

The runtime owns the bytes, this package the ids: which block of which group holds which tokens of
which request. It knows nothing of devices, steps or schedules.
"""

from octavo.cache.groups import KVGroup, kv_groups
from octavo.cache.kv_cache import KVCache, RequestBlocks

__all__ = ["KVCache", "KVGroup", "RequestBlocks", "kv_groups"]
