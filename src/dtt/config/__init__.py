"""Contains all configuration keys of dtt: frozen, documented, validated before work starts.
May touch: errors. Never torch, numpy or anything slow to import."""
