"""The commands, one thin function each. Importing these modules must stay cheap: functions import what is heavy."""
