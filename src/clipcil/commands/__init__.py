"""The commands, one thin function each. Importing these modules must stay cheap: heavy imports stand inside."""
