"""The file sink: writes Parquet, ORC, JSON, CSV or Avro files, locally or through Hadoop's file system API."""
