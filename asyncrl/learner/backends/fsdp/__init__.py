"""The FSDP2 backend, with pipeline stages and offloading."""
