"""Variants on the Hub: what is uploaded, the card that goes with it, and what is said when it cannot be done."""
