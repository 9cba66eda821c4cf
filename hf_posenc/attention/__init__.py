"""The attention engine: score terms in, attention out, by the cheapest exact way (`paths`)."""
