"""The picture of a coordination log: who held which partition when, and what happened to it.

`builder` turns the log's records into the values of `model`, which name no library that draws. `page` writes them as
one HTML page, in which `figure` draws with Bokeh. The command `marshal-dagster timeline` reads the records.
"""
