"""How the server turns updates into the next shared tensors."""
