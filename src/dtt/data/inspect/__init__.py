"""What lies in a folder or file of text or tokens, for people who look before they train.
May touch: data, config, runtime, artifacts, errors."""
