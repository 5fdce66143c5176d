"""
A change-data pipeline: merchants, orders and refunds, from PostgreSQL through Kafka to totals per merchant and minute.

``make demo-cdc`` runs all of it. In the order of the data:

- `shop` is the merchants' database, with a generator of transactions.
- `connector` reads its committed changes (`events.pgoutput`) and writes them to Kafka as change events
  (`events.envelopes`), at least once; `events.dirty` adds malformed ones.
- `job` is the streaming query, and the part to read first. It sorts out dirty records (`changes`), joins the rest
  (`processor`), and publishes both to Kafka, exactly once.
- `totals` adds up the result, as Parquet files.
- `demo` starts and kills these programs, compares the result with the database, and draws it; `trial` has its parts.
"""
