"""The Muon optimizer for sharded matrices.
May import: config, runtime."""
