"""Every knob of dtt, and nothing but knobs: frozen, documented, checked before work starts.
May touch: errors. Never torch, numpy or anything slow to import."""
