"""The pipeline's topics."""

MERCHANTS, ORDERS = "shop.public.merchants", "shop.public.orders"
"""Change events in Debezium's form, one topic per table."""

REFUNDS = "shop.refunds"
"""Change events in Canal's form."""

SOURCES = (MERCHANTS, ORDERS, REFUNDS)

RESULT = "merchant-orders"
"""Orders with their merchants and refunds, by ``merchant/order``; the last record of a key counts."""

DEAD_LETTERS = "dead-letters"
"""Dirty records of the sources, unchanged; their headers say where they came from and why they were refused."""

PARTITIONS = {MERCHANTS: 1, ORDERS: 2, REFUNDS: 1, RESULT: 2, DEAD_LETTERS: 1}
