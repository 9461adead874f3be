"""All configuration keys of dtt: frozen, documented, validated before work starts.
May import: errors. Never torch, numpy or anything slow to import."""
