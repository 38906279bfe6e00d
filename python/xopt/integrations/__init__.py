"""What other libraries offer for taking over a part of their work. Nothing here is imported before they are."""
