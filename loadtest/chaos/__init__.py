"""The service under kills: drivers with a model of the answers they got, and the comparison with the stored state."""
