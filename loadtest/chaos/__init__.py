"""The service under kills: drivers with a model of what they were told, and the comparison with what is stored."""
