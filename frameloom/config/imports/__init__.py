"""Commands and configurations of other trainers, read and told as recipes. Nothing here runs what it reads."""
