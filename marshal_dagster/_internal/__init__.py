"""What several packages use and no one of them owns: file locks, folders of the user, jars, Java's property files.

Modules here import the standard library and the exceptions, and one another.
"""
