"""Change sets from their arrival until they are durable."""
