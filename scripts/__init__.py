"""Scripts that draw the figures of the documentation and write its generated pages."""
