"""pfedrlla"""
