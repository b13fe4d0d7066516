"""What travels, and whether it is what was announced."""

from headrace.sync.manifest import check_manifest, verify

__all__ = ["check_manifest", "verify"]
