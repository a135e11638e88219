"""What tests share, in folders by subject."""
