"""Named overlays on params.yaml, one file each; `ratchet recipe NAME` applies one."""
