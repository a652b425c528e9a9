"""Body formats: header bytes to tensor metadata and back; the payload stays where it is."""
