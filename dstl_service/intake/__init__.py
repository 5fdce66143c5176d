"""Change sets from arrival to durability."""
