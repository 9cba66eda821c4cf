"""Bringing a changed model back to quality: teachers, text of the model's own, and what is trained."""
