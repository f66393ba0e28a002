"""The file sink: Parquet or other files in a local folder or behind Hadoop's file system layer."""
