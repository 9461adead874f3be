"""The Muon optimizer for sharded matrices."""
