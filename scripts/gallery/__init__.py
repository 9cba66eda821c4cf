"""The gallery of all schemes, docs/gallery.md: its models, pictures and text."""
