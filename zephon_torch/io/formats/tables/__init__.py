"""Tables: Arrow and Parquet."""
