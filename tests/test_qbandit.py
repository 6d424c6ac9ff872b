"""qbandit"""
