"""hasten.nn"""
