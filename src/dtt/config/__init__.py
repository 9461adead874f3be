"""All configuration keys of dtt: frozen, documented, validated before work starts."""
