"""
A change-data pipeline: merchants, orders and refunds, from PostgreSQL through Kafka to totals per merchant and minute.

``make demo-cdc`` runs all of it. In the order of the data:

- `shop` is the merchants' database, with a generator of transactions.
- `connector` reads its committed changes (`pgoutput`) and writes them to Kafka as change events (`envelopes`), at
  least once.
- `job` is the streaming query, and the part to read first. It sorts out dirty records (`changes`), joins the rest
  (`processor`), and publishes both to Kafka, exactly once.
- `totals` adds the result up, as Parquet, and `page` draws that.
- `demo` has a `run` start and kill these programs, and `checks` compare what comes out with the database.
"""
