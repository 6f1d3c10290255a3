"""An embedded platform, an embedded Redis and stand-ins, for one machine and for tests."""
