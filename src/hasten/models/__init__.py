"""hasten.models"""
